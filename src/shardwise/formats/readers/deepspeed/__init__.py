"""Checkpoints of DeepSpeed: those of its engine, and universal ones.

Both get the same names:

    model.<name>             the trained weights, in fp32 where DeepSpeed keeps masters; frozen
                             parameters and buffers, in their own dtypes
    module.<name>            the weights of the module, if they have a lower precision
    optimizer.<name>.<key>   state of the optimizer, and `optimizer.param_groups`
    scheduler                the state of the learning rate scheduler
    client_state.<key>       the client state that the user passed to DeepSpeed
    deepspeed.<key>          counters, the loss scaler, the configuration, the version

Training resumes exactly from `model` and `optimizer`. Load a bf16 module that has masters from
`module`.

A load goes through these modules in this order: `reader` (the walk), `files` (which files there
are), `ranks` and `states` (what they contain), `agreement` (whether they are from one save),
`groups` and `zero` (how ZeRO's flat partitions become boxes), `tensor_parallel` (how shards make up
parameters), `optimizers`. `universal` reads universal checkpoints.
"""
