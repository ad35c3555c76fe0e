"""The trainer on Megatron Core: ``mindspeed pretrain``.

==================  ==============================================================
options             the trainer's own flags, one dataclass per recipe section
arguments, flag_types, recipe
                    command line and YAML recipe -> namespace with Megatron-LM's names
resolve             what follows from what, and every contradiction at once
configs             namespace -> Megatron Core's configuration objects
setup, model, data  process groups and seeds; model, optimizer, schedule; micro-batches
step, loop          one step; the loop around it
log, quiet          what is printed and recorded, and which warnings are not
stopping            SIGTERM and time limits
guard, launch       one rank fails, all stop; local ranks without torchrun
estimate            ``--dry-run``
pretrain            puts the parts together
==================  ==============================================================
"""
