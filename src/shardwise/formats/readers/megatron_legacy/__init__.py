"""Legacy checkpoints of Megatron-LM: a directory for each model-parallel rank.

    iter_0000100/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt    and, of the distributed optimizer,
    iter_0000100/mp_rank_TT[_PPP][_EEE]/distrib_optim.pt      buffers that were gathered

They are named so:

    model.<name>             what was trained, by Megatron's own names, as one rank alone would
                             have them: the fp32 masters where there are any
    module.<name>            the weights as the module had them, if these are of a lower precision
    optimizer.<name>.<key>   state of the optimizer, and `optimizer.param_groups`
    args, iteration, …       plain values, as the first rank has them
    rng_state.<rank>         by the name of the rank's directory

The vocabulary keeps the padding that it has. Which rank has what, `formats/specs/megatron.spec`
says; the specifications of published models can be laid over it.
"""
