"""What simulator and runtime share: admission, consumption, triggers, ages and queue state.

Pure decisions: values in, decisions out. No clock, no transport, no threads; every state is plain JSON when it has to
be saved. Conventions (all modules): step i, counted from 0, trains with version i and produces version i + 1. The gate
counts *published* versions, those the engines have loaded. A sample's age is i - birth, where birth is the oldest
version that produced any of its tokens.
"""
