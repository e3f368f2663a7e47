"""Offer general tools that the other packages use. The tools import only the module `errors` of this
project. The modules in reading order:

events            records what happens to a mesh, for any number of readers
gpu_inventory     finds a host's GPUs and divides them and their memory among processes
install_hints     names commands that install missing packages, and pages of docs/ that explain messages
private_folder    makes folders to which only their owner can write
descriptors       counts file descriptors, and keeps them from child processes
quantities        writes times, bytes and counts for people, and reads numbers of bytes that a user wrote
printable         makes text safe to print, to write to files and to send
spinning          keeps a process awake for a short time while a message is expected
"""
