"""Transfer arrays between GPUs over NCCL. The modules, in reading order:

order       links, and the order in which a program's transfers go on them
transport   the transport: links to peers, steps, aborts
link_end    one end of a link, with its two threads
library     the calls of NCCL and CUDA (the only importer of NCCL's bindings)
"""
