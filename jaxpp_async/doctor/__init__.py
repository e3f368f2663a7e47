"""doctor: hosts in, what would keep a run on them from working out. `cli` is its command line.

examine, gather            all hosts asked at once, with deadlines; one machine looked at
host, host_link, talk      the program on a host; our end of it; what the two say to each other
start_jax, start_ucx       both started, each in a process of its own
probe                      latency and bandwidth between two hosts
facts, finding             what was found; what is to be said of it: plain data
room                       which host gets how many processes
judge, judge_gpu, judge_network   facts judged
show                       findings for people and for programs
"""
