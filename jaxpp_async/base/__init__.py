"""Tools that know nothing of meshes, actors or JAX. In reading order:

events            records what happens to a mesh, for any number of readers
gpu_inventory     finds a host's GPUs and divides them and their memory among processes
install_hints     names the commands that install what is missing, and the pages that explain it
private_folder    makes folders that only their user can write
descriptors       counts descriptors, and keeps them from child processes
printable         makes text printable
spinning          keeps a process awake for a moment where a message is expected
frozen            makes dataclasses that are cheap to create
"""
