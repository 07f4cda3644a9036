-- name: InboxClaimBatch :many
-- InboxClaim for many messages of one consumer; the caller has removed repeated ids and sorted them, so that two batches
-- take their locks in one order. Each id is reported: claimed is ours to run, everything else goes one by one. Locks: one
-- advisory lock per id, tried, in a column of a materialized CTE (in WHERE it would be taken for rows that are then
-- dropped), and the new rows. Index: primary key. Two replicas: an id that another one holds is left out, not waited
-- for. Takeovers are not part of it.
with k as materialized (
    select u.n, u.message_id, u.fingerprint, u.trace_id, pg_try_advisory_xact_lock(commitbox.inbox_lock(@consumer::text, u.message_id)) as mine
      from rows from (unnest(@message_ids::text[]), unnest(@fingerprints::bytea[]), unnest(@trace_ids::text[]))
           with ordinality as u (message_id, fingerprint, trace_id, n)
), i as (
    insert into commitbox.inbox as b (consumer, message_id, status, attempts, fingerprint, trace_id, finished_at)
    select @consumer::text, k.message_id, 'completed', 1, nullif(k.fingerprint, ''), nullif(k.trace_id, ''), clock_timestamp()
      from k where k.mine order by k.message_id
    on conflict (consumer, message_id) do nothing
    returning b.message_id
)
select k.n::integer as position, (i.message_id is not null)::boolean as claimed
  from k left join i on i.message_id = k.message_id
 order by k.n;

-- name: InboxStoreResults :exec
-- InboxStoreResult for a batch; it travels with COMMIT. Locks: rows that this transaction has inserted. Index: primary
-- key.
update commitbox.inbox i set result = u.result
  from rows from (unnest(@message_ids::text[]), unnest(@results::bytea[])) as u (message_id, result)
 where i.consumer = @consumer::text and i.message_id = u.message_id and i.status = 'completed';
