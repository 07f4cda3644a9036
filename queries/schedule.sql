-- name: ScheduleClock :one
-- The database's time, for the first tick of a job that has no row. Takes no lock, reads no table.
select clock_timestamp()::timestamptz as now;

-- name: ScheduleLook :many
-- The jobs' rows and the database's time in one look. Primary key, a few rows, no lock: only a hint, since every change
-- that follows compares what it saw here on the row's newest version.
select name, spec, zone, seen_at, paused, next_tick_at, due_at, runs, tick_at, lease_until, clock_timestamp()::timestamptz as now
from commitbox.schedule_job where name = any(@names::text[]);

-- name: ScheduleRegister :exec
-- Makes a job's row. Primary key; of several processes that start at once one inserts, the others do nothing.
insert into commitbox.schedule_job (name, spec, zone, next_tick_at, due_at)
values (@name, @spec, @zone, @next_tick_at, @due_at) on conflict (name) do nothing;

-- name: ScheduleSeen :exec
-- Says that a process with the row's timetable is alive, so that processes with another one stand by. One row by primary
-- key, HOT, skipped if somebody holds it; the age is checked on the locked row, so of many replicas one writes per interval.
with k as materialized (
    select j.name from commitbox.schedule_job j where j.name = @name for no key update skip locked
)
update commitbox.schedule_job s set seen_at = clock_timestamp() from k
where s.name = k.name and s.spec = @spec and s.zone = @zone and s.seen_at < clock_timestamp() - make_interval(secs => @age_seconds::float8);

-- name: ScheduleMove :execrows
-- Gives the row another next tick without a run: for another timetable, for ticks that are given up, after a clock that
-- went back. One row by primary key, skipped if somebody holds it. It compares timetable and tick on the newest version: of
-- several processes one changes the row, the others change nothing.
with k as materialized (
    select j.name from commitbox.schedule_job j where j.name = @name for no key update skip locked
)
update commitbox.schedule_job s
   set spec = @spec, zone = @zone, next_tick_at = @next_tick_at, due_at = @due_at, missed = s.missed + @missed::bigint,
       seen_at = clock_timestamp()
  from k
where s.name = k.name and s.spec = @seen_spec and s.zone = @seen_zone and s.next_tick_at = @seen_tick_at;

-- name: ScheduleClaim :one
-- Claims a tick: the row moves on to the tick after it. One row by primary key. A row that somebody holds is skipped: one
-- loop serves all jobs, and must not wait for an operator's open transaction on one of them. The tick is compared on the
-- locked row, so a second claimer gets no row; reading first and writing then would let both run. The
-- number of the run fences whatever an earlier run still sends. A paused job and one that runs are not claimed.
with k as materialized (
    select j.name from commitbox.schedule_job j where j.name = @name for no key update skip locked
)
update commitbox.schedule_job s
   set tick_at = s.next_tick_at, attempt = case when s.tick_at = s.next_tick_at then s.attempt + 1 else 1 end,
       next_tick_at = @next_tick_at, due_at = @due_at,
       runs = s.runs + 1, owner = @owner::text, lease_until = clock_timestamp() + make_interval(secs => @lease_seconds::float8),
       started_at = clock_timestamp(), finished_at = null, outcome = 'running', error = null, seen_at = clock_timestamp()
  from k
where s.name = k.name and s.spec = @spec and s.zone = @zone and s.next_tick_at = @tick_at
  and s.due_at <= clock_timestamp() and s.lease_until is null and not s.paused
returning s.runs, s.attempt;

-- name: ScheduleRenew :execrows
-- Prolongs the lease of a run: primary key, HOT. 0 rows: it has ended, even if nobody has noticed yet.
update commitbox.schedule_job set lease_until = clock_timestamp() + make_interval(secs => @lease_seconds::float8)
where name = @name and runs = @run and lease_until > clock_timestamp();

-- name: ScheduleFinish :execrows
-- Writes the outcome of a run: primary key, fenced by its number. 0 rows: it was seen as died, or this was written before
-- and the answer lost. A tick that is given back is due again, for a run that was cut short.
update commitbox.schedule_job
   set lease_until = null, finished_at = clock_timestamp(), outcome = @outcome::text, error = sqlc.narg('error')::text,
       failures = failures + case when @outcome::text in ('succeeded', 'cancelled') then 0 else 1 end,
       succeeded_at = case when @outcome::text = 'succeeded' then clock_timestamp() else succeeded_at end,
       next_tick_at = case when @give_back::boolean and attempt < @attempts_max::smallint then tick_at else next_tick_at end,
       due_at = case when @give_back::boolean and attempt < @attempts_max::smallint then greatest(tick_at, clock_timestamp()) else due_at end
where name = @name and runs = @run and lease_until is not null;

-- name: ScheduleBury :execrows
-- Ends a run whose lease has ended. Primary key, skipped if somebody holds the row; number and lease are compared on the
-- newest version, so a renewal that commits first saves the run, and one process counts the death.
with k as materialized (
    select j.name from commitbox.schedule_job j where j.name = @name for no key update skip locked
)
update commitbox.schedule_job s
   set lease_until = null, finished_at = clock_timestamp(), outcome = 'died', failures = s.failures + 1,
       error = 'its process ended, or lost touch with the database',
       next_tick_at = case when @give_back::boolean and s.attempt < @attempts_max::smallint then s.tick_at else s.next_tick_at end,
       due_at = case when @give_back::boolean and s.attempt < @attempts_max::smallint then greatest(s.tick_at, clock_timestamp()) else s.due_at end
  from k
where s.name = k.name and s.runs = @run and s.lease_until <= clock_timestamp();

-- name: ScheduleStatus :many
-- Every job and its last run, for people. A few rows, read in order of the primary key; takes no lock.
select name, spec, zone, paused, seen_at, next_tick_at, due_at, tick_at, started_at, finished_at, succeeded_at,
       coalesce(extract(epoch from duration), 0)::float8 as duration_seconds,
       coalesce(outcome, '')::text as outcome, coalesce(error, '')::text as error, coalesce(owner, '')::text as owner,
       attempt, runs, failures, missed
from commitbox.schedule_status order by name;
