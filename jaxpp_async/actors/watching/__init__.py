"""watching: what happens to the actors of a mesh, noticed.

heartbeat             an actor's beats, from a thread of its own
watch                 beats and steps judged, every half second
supervision           which failure is the cause
clocks, clock_watch   what other machines' clocks show
telling, routes       events of the mesh
"""
