"""Chooses degrees, stage cut and schedule by simulating the programs that would run.

The words, from question to answer:

- problem: a model and a machine, as far as planning asks about them;
- space: what may be chosen; what a user has pinned has one value there;
- layout: the ranks of each kind, and how a batch is cut into microbatches;
- cut: how many of the model's units each stage has;
- order: a schedule with all that decides its instructions; walked once, it is a ``OrderGraph``;
- group: orders that share layout, recompute policy, cut, costs and one lower bound;
- candidate: one order of a group, which is what can be simulated;
- outcome: a candidate's time and memory; where a layout has none to list, a refusal says why;
- answer: the outcomes listed as plans, and why all others are not.
"""
