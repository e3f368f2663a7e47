"""Define the control protocol between the controller and the actor processes. The modules in reading order:

messages         defines the messages
actor_info       assigns numbers to the processes of a mesh and describes actors and their progress
codec            turns messages into bytes, and bytes into messages whose fields it has checked
frames           signs messages and authenticates both sides (a pure state machine)
connection       runs a conversation of signed frames over a socket with asyncio
line_protocol    exchanges messages as lines with a program over its stdin and stdout
parent_watch     ends an actor process when its controller is gone, and defines leases and exit codes
clocks           compares the clocks of processes, and counts the time for which a process was awake
log_forwarding   carries log records from actors to the controller
task_group       owns asyncio tasks and limits how long something may take
"""
