"""Makes each process a host of its own to NCCL, which takes two ranks of one host on one GPU for a mistake; for tests alone."""

import os

if os.environ.get("R3TEST_HOSTS"):
    os.environ.update(NCCL_HOSTID=f"process-{os.getpid()}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
