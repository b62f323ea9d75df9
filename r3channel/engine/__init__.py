"""The engine room: what runs inside an inference engine's processes.

`capture` is the pure part, `sglang` the only module that talks to SGLang, `sglang_hooks` the list of names it needs there.
"""
