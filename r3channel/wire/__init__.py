"""The bytes on the wire: frames, codecs, digests. No I/O; numpy only."""
