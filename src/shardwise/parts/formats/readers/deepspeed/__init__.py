"""Checkpoints of DeepSpeed: those that its engine saves (`reader`), and universal ones.

Both get the same names:

    model.<name>             the trained weights: float32 master weights if DeepSpeed keeps them;
                             frozen parameters and buffers, in their own dtypes
    module.<name>            the weights of the module, if they have a lower precision
    optimizer.<name>.<key>   state of the optimizer, and `optimizer.param_groups`
    scheduler                the state of the learning rate scheduler
    client_state.<key>       the client state that the user passed to DeepSpeed
    deepspeed.<key>          counters, the loss scaler, the configuration, the version

Training resumes exactly from `model` and `optimizer`. Load a bf16 module that has master weights
from `module`.

`reader` and `universal` call the other modules in this order:

    files                       find the files, and require all of them
    ranks, states               read and parse them, and check that they are from one save
    tensor_parallel             how the shards of tensor-parallel ranks make up parameters
    zero                        which ranges of flattened parameters each rank holds
    without_zero                the state of optimizers that ZeRO does not divide
    manifest                    add all of these to the builder
"""
