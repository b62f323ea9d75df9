class Sample:
    rollout_routed_experts = None

    def __init__(self, index):
        self.index, self.tokens = index, []

    def append_response_tokens(
        self,
        args,
        *,
        tokens=None,
        log_probs=None,
        trainable=True,
        meta_info=None,
        text=None,
        update_terminal_info=True,
    ):
        self.tokens += tokens
        self._apply_meta_info(args, meta_info, new_token_count=len(tokens))

    def _apply_meta_info(
        self, args, meta_info, *, new_token_count=0, pad_missing_top_p=False, update_terminal_info=True
    ):
        assert "routed_experts" not in meta_info, "it would be decoded as int32"

    def get_rollout_routed_experts_length(self):
        return 0
