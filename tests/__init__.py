"""Tests of `jaxpp_async`, a folder for each package; `support` is on the path, `integration` runs whole
meshes."""
