def build_dp_schedule(args, train_parallel_config, total_lengths, *, global_batch_size, rollout_indices):
    """Samples dealt out to the ranks, a micro-batch each."""
    ranks = train_parallel_config["dp_size"]
    partitions = [[*range(rank, len(total_lengths), ranks)] for rank in range(ranks)]
    return partitions, [[[*range(len(places))]] for places in partitions], [1], [len(total_lengths)]
