"""control: the control channel between controller and actor: sockets around `protocol`.

connection     one socket and its `Wire`; both ends
gate           where actors come in, and who is refused (`refusals`)
serve          the actor's end: requests in, one by one
vigil          an event loop kept awake for a moment: an actor's behind a step, the controller's during one
failed_reply   an exception, as a reply
records        what is logged in an actor, logged again on the controller
"""
