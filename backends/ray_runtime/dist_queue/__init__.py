"""DistQueue: rows with named fields between stages.

`rows` the values that travel · `columns` fields as arrays, packed and cut · `table` what is in the queue, without Ray ·
`service` the same for callers that wait, the class of the actor · `client` a process's end · `shards` several actors
behind one queue.

Contents lie in Ray's object store, packed and by reference; the actor holds ids, groups, versions, lengths and where
each field of a row lies. `rlflow.protocol.queue.QueueState` decides what may enter, who gets what, and what may go.
"""
