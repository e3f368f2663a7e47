"""ucx: transfers between processes, over UCX and, large ones within a host, through memory that both map.

transport, links     the transport; what it knows of each peer
context, ucp         UCX with our settings (the only importer of ucxx); its C functions for messages
direct (`_words`, `_receive`, `_send`), offers   large messages: the sender writes where the receiver waits
"""
