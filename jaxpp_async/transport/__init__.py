"""transport: moves buffers between actors. Imports nothing; take `memory` or `ucx`, both keep `base.Transport`."""
