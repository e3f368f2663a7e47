"""The doctor is the command `jaxpp-async doctor`. The command checks whether a run on the given
hosts would work, and says what is missing on each host.

facts             defines plain data: the run that the user asked for, facts about hosts, and findings
protocol          defines the messages between the doctor and its program on a host
examine           asks all hosts in parallel, with deadlines, and measures the links between them
host              is the program on a host, which answers the doctor and measures a link to another host
gather            collects the facts about one machine
probe_programs    starts JAX or UCX in a separate process, to see whether it works
judge             turns facts into findings (statements with a verdict and a remedy)
judge_gpu         makes the findings about GPUs, CUDA packages and NCCL
judge_network     makes the findings about UCX, InfiniBand and the links between hosts
show              prints findings for people, or converts them to JSON
"""
