"""crew: the actors of one mesh, as the controller holds them.

bringup, crew, ending     started, connected, replaced, ended
agreement                 why the processes of a mesh cannot work together
rpc, outbox               requests and replies; what may have to be asked again
step_handle               a step under way, for whoever waits for it
programs, deploying       who has which program; how it gets there
linking                   NCCL's links for them
host_requests, host_data  numpy arrays to actors and back, and the data plane that they take
frees                     arrays that nobody needs any more
"""
