"""The doctor is the command `python -m jaxpp_async doctor`, which says whether a run on some hosts would
work, and what is missing on them.

facts             plain data: the run that the user asked for, what was found, findings; processes per host
protocol          the orders and answers between the doctor and its program on a host
examine           asks all hosts in parallel, with deadlines, and measures the links between them
host              the program on a host: answers orders, and measures latency and bandwidth to another host
gather            the facts about one machine
probe_programs    starts JAX, or UCX, in a process of its own
judge             turns facts into findings with remedies
judge_gpu         the findings about GPUs, CUDA packages and NCCL
judge_network     the findings about UCX, InfiniBand and the links between hosts
show              prints findings for people, or converts them to JSON
"""
