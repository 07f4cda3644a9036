-- +goose Up

-- One row per job: what its timetable is, when its next tick is, and its last run. A tick is claimed by moving the row on
-- to the tick after it, so it can be claimed once. All times are this server's.
create table commitbox.schedule_job (
    name         text collate "C" not null primary key check (octet_length(name) between 1 and 63),
    spec         text collate "C" not null check (octet_length(spec) between 1 and 255),
    zone         text collate "C" not null check (octet_length(zone) between 1 and 63),
    seen_at      timestamptz      not null default clock_timestamp(), -- when a process with this timetable last looked
    paused       boolean          not null default false,
    next_tick_at timestamptz      not null,
    due_at       timestamptz      not null, -- the next tick and its jitter
    missed       bigint           not null default 0, -- times that ticks were given up because nobody was there
    runs         bigint           not null default 0, -- also the last run's fencing token
    failures     bigint           not null default 0,
    tick_at      timestamptz,     -- the tick of the last run
    attempt      smallint         not null default 0, -- runs that this tick has had
    owner        text             check (octet_length(owner) between 1 and 255), -- the process of the last run
    lease_until  timestamptz,     -- while it runs
    started_at   timestamptz,
    finished_at  timestamptz,
    outcome      text collate "C" check (outcome in ('running', 'succeeded', 'failed', 'panicked', 'timed_out', 'hung', 'died', 'cancelled')),
    error        text             check (octet_length(error) <= 1000),
    succeeded_at timestamptz,     -- the end of the last run that succeeded
    constraint schedule_job_due check (due_at >= next_tick_at and isfinite(due_at) and isfinite(next_tick_at)),
    constraint schedule_job_run check (
        num_nulls(tick_at, owner, started_at, outcome) = case runs when 0 then 4 else 0 end
        and (attempt = 0) = (runs = 0)
        and (outcome is not distinct from 'running') = (lease_until is not null)
        and (finished_at is null) = (runs = 0 or outcome = 'running')
        and isfinite(lease_until))
) with (fillfactor = 50);

-- What operators look at. A run whose process has died is running until its lease has ended, and then shown as died,
-- before any other process has noticed.
create view commitbox.schedule_status as
select name, spec, zone, paused, seen_at, next_tick_at, due_at, tick_at, started_at, finished_at,
       coalesce(finished_at, case when lease_until <= clock_timestamp() then lease_until else clock_timestamp() end) - started_at as duration,
       case when lease_until <= clock_timestamp() then 'died' else outcome end as outcome,
       error, owner, attempt, runs, failures, missed, succeeded_at
from commitbox.schedule_job;

-- Stops a job's ticks until schedule_resume; a run that is under way goes on. Returns whether there is such a job.
-- +goose StatementBegin
create function commitbox.schedule_pause(job text, reason text default null) returns boolean language plpgsql as $$
begin
    update commitbox.schedule_job set paused = true where name = schedule_pause.job;
    if found then
        insert into commitbox.audit (action, target, reason) values ('schedule_pause', schedule_pause.job, schedule_pause.reason);
    end if;
    return found;
end
$$;
-- +goose StatementEnd
comment on function commitbox.schedule_pause is
    'true: no tick begins until schedule_resume, a run that is under way goes on. false: schedule_status has no job of this name.';

-- Lets a job's ticks go on. What was missed in between is treated as if no process had been there.
-- +goose StatementBegin
create function commitbox.schedule_resume(job text, reason text default null) returns boolean language plpgsql as $$
begin
    update commitbox.schedule_job set paused = false where name = schedule_resume.job;
    if found then
        insert into commitbox.audit (action, target, reason) values ('schedule_resume', schedule_resume.job, schedule_resume.reason);
    end if;
    return found;
end
$$;
-- +goose StatementEnd
comment on function commitbox.schedule_resume is
    'true: ticks go on, for a job that was not paused too. false: schedule_status has no job of this name.';

-- +goose Down
drop function commitbox.schedule_resume(text, text);
drop function commitbox.schedule_pause(text, text);
drop view commitbox.schedule_status;
drop table commitbox.schedule_job;
