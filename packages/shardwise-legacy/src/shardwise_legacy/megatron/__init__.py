"""Legacy checkpoints of Megatron-LM, which have a directory for each model-parallel rank.

    iter_0000100/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt    and, of the distributed optimizer,
    iter_0000100/mp_rank_TT[_PPP][_EEE]/distrib_optim.pt      its gathered buffers

They get these names:

    model.<name>             the trained weights under Megatron's names, as a single rank would have
                             them: the float32 master weights if there are any
    module.<name>            the weights of the module, if they have a lower precision
    optimizer.<name>.<key>   state of the optimizer, and `optimizer.param_groups`
    args, iteration, …       plain values of the first rank
    rng_state.<rank>         random generator states, by the name of the rank's directory

The vocabulary keeps its padding. `megatron.spec` says how the ranks' arrays make up
tensors; specifications of published models can be applied to the result.

`ranks` finds and reads the files. `optimizers` assigns optimizer state to parameters. `reader`
checks that the files are complete and from one save, and builds the manifest.
"""
