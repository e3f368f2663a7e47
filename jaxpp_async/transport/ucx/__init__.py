"""Transfer buffers between processes over UCX. The modules, in reading order:

transport     the transport: links to peers, operations that UCX has not finished, aborts
links         a connected peer, an operation, and their errors
progress      UCX's progress on the event loop
one_copy      large messages within a host, which the sender copies into the receiver's memory
offers        offers of a receive's memory to senders on this host, made before they send
context       UCX contexts with this package's settings, their limits and ports (the only importer of ucxx)
net_devices   the network devices that UCX will use
tag_api       UCX's C functions for tagged messages
"""
