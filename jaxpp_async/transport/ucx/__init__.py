"""ucx: transfers between processes, over UCX and, large ones within a host, through memory that both map.

transport, links      the transport; what it knows of each peer
progress              UCX driven on the event loop
context, ucp          UCX with our settings (the only importer of ucxx); its C functions for messages
net_devices, ports    devices that there are; a port that is free
interfaces, limits    devices of an address; descriptors and shared memory that there are
direct, direct_words  large messages within a host: the sender writes where the receiver waits
direct_receive, direct_send, offers   its two sides; what waits is offered
"""
