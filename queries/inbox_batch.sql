-- name: InboxClaimBatch :many
-- InboxClaim for many messages of one consumer; the caller has removed repeated ids and sorted them, so that two batches
-- take their locks in one order, which is that of the arrays. Returns the ids that are ours to run, in their order; everything
-- else goes one by one. Locks: one advisory lock per id, tried, and the new rows. Nothing is dropped after the locks are tried,
-- so none is taken for nothing. Index: primary key. Two replicas: an id that another one holds is left out, not waited for.
-- Takeovers are not part of it.
insert into commitbox.inbox as i (consumer, message_id, status, attempts, received_at, fingerprint, trace_id, finished_at)
select @consumer::text, u.message_id, 'completed', 1, statement_timestamp(), nullif(u.fingerprint, ''), nullif(u.trace_id, ''), statement_timestamp()
  from rows from (unnest(@message_ids::text[]), unnest(@fingerprints::bytea[]), unnest(@trace_ids::text[])) as u (message_id, fingerprint, trace_id)
 where pg_try_advisory_xact_lock(commitbox.inbox_lock(@consumer::text, u.message_id))
on conflict (consumer, message_id) do nothing
returning i.message_id;

-- name: InboxStoreResults :exec
-- InboxStoreResult for a batch; it travels with COMMIT. Locks: rows that this transaction has inserted. Index: primary
-- key.
update commitbox.inbox i set result = u.result
  from rows from (unnest(@message_ids::text[]), unnest(@results::bytea[])) as u (message_id, result)
 where i.consumer = @consumer::text and i.message_id = u.message_id and i.status = 'completed';
