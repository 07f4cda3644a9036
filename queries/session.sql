-- name: LockTimeout :exec
-- Bounds every lock wait of this transaction.
select set_config('lock_timeout', @milliseconds::text, true);
