"""Transfer arrays between GPUs over NCCL. The modules, in reading order:

order       links (one direction between two devices), and the order in which transfers go on them
transport   the transport: links to peers, steps, aborts
link_end    one end of a link, with its two threads
library     the calls of NCCL and CUDA (the only importer of NCCL's bindings)
"""
