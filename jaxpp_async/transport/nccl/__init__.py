"""nccl: transfers between GPUs, over NCCL.

transport, end   the transport; our end of one link
plan             who needs a communicator with whom, and whose turn it is
library          the calls of NCCL and CUDA (the only importer of NCCL's bindings)
"""
