"""The trainer on Megatron Core: ``mindspeed pretrain``.

==================  ==============================================================
options             the trainer's own flags, one dataclass per recipe section
arguments, flag_types, legacy_flags, recipe
                    command line and YAML recipe -> namespace with Megatron-LM's names
resolve             derived values, and every contradiction at once
configs             namespace -> Megatron Core's configuration objects
setup, model, data  process groups and seeds; model, optimizer, schedule; micro-batches
forward_step        forward pass and loss of one micro-batch
step, loop          one step; the loop around it
log, sinks          the log line and the files; warning_filters: warnings that are not shown
stopping            SIGTERM and time limits
fail_together       one rank fails, all stop
launch              local ranks without torchrun
parameter_counts    parameters of every rank, from the models they build; pipeline_figures: bubble
pretrain            from final values to the last checkpoint
==================  ==============================================================
"""
