"""Checkpoints of DeepSpeed, native and universal.

Both are named alike:

    model.<name>             what was trained: the fp32 masters where there are any; beside them
                             frozen parameters and buffers, in the dtypes that they have
    module.<name>            the weights as the module had them, if these are of a lower precision
    optimizer.<name>.<key>   state of the optimizer, and `optimizer.param_groups`
    scheduler                the state of the learning rate's scheduler
    client_state.<key>       what the user gave to be saved
    deepspeed.<key>          counters, the loss scaler, the configuration, the version

So a training goes on exactly from `model` and `optimizer`; a module in bf16 beside its own masters
is loaded from `module`.
"""
