"""Training on preferences: losses of pairs of answers, by the sums of their log-probabilities.

=================  ===============================================================================
``answers``        sums over the tokens of each answer of a micro-batch
``losses``         DPO and its relatives, rewards, by these sums
``megatron_head``  the head of a reward model
=================  ===============================================================================

Formulas are those of TRL 1.16. Which answers a micro-batch has is in its data
(:mod:`mindspeed.data.preference_dataset`), the training in :mod:`mindspeed.training.preference`.
"""
