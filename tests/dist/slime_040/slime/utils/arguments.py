import argparse

_KNOWN: dict[object, str] = {
    False: "colocate use_critic use_fault_tolerance offload_rollout debug_train_only debug_rollout_only release_train "
    "use_routing_replay offload_train sequence_parallel allgather_cp load_debug_rollout_data",
    None: "rollout_batch_size rollout_max_response_len rollout_max_prompt_len rollout_max_context_len "
    "virtual_pipeline_model_parallel_size decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers",
    1: "actor_num_nodes tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
    "expert_model_parallel_size n_samples_per_prompt global_batch_size",
    2: "actor_num_gpus_per_node",
    128: "num_experts data_pad_size_multiplier",
    "full": "update_weight_mode",
}


def parse_args(add_custom_arguments=None, *, return_restore_plan=False):
    parser = argparse.ArgumentParser()
    parser.add_argument("--hf-checkpoint")
    args = add_custom_arguments(parser).parse_args()
    for value, names in _KNOWN.items():
        vars(args).update(dict.fromkeys(names.split(), value))
    return (args, "a plan") if return_restore_plan else args
