-- name: RegisterChannel :exec
-- Makes the channel's row. Primary key; of several relays that start at once one inserts, the others do nothing.
insert into commitbox.outbox_channel (channel) values (@channel) on conflict (channel) do nothing;

-- name: RegisterShards :exec
-- Makes the channel's 64 shard rows, in order of their key, so that relays that start at once cannot deadlock.
insert into commitbox.outbox_shard (channel, shard)
select @channel, n::smallint from generate_series(0, 63) as n order by n
on conflict (channel, shard) do nothing;

-- name: LockChannel :exec
-- The first statement of every change of membership (join, reap, claim): row lock on the channel, primary key. What
-- follows looks in fresh statements. Claims in one statement stole shards from live relays: the shard row is re-checked
-- on its newest version, the liveness of its owner is not.
select 1 from commitbox.outbox_channel where channel = @channel for no key update;

-- name: ReapRelays :exec
-- Removes expired relays, under the channel's lock. The row is re-checked after a wait: a renewal that commits first
-- saves its relay. A few rows per channel, no index needed.
delete from commitbox.outbox_relay where channel = @channel and lease_until < clock_timestamp();

-- name: JoinRelay :exec
-- Makes the relay's lease row, under the channel's lock. The owner id is new for every incarnation; a second try after
-- a lost answer finds its row.
insert into commitbox.outbox_relay (owner, channel, lease_until)
values (@owner::uuid, @channel, clock_timestamp() + make_interval(secs => @lease_seconds::float8))
on conflict (owner) do nothing;

-- name: ClaimShards :exec
-- Takes free shards up to the relay's fair share, under the channel's lock. Free means: no owner, or an owner without a
-- lease row, so that no shard is lost with its owner. Primary key; 64 rows per channel. Epochs come from a sequence:
-- a shard row made anew never repeats one.
with member as (
    select r.owner, row_number() over (order by r.joined_at, r.owner) - 1 as rank, count(*) over () as members
    from commitbox.outbox_relay r where r.channel = @channel
), share as (
    select 64 / members + case when rank < 64 % members then 1 else 0 end as target from member where owner = @owner::uuid
), free as materialized (
    select s.shard, s.owner is not null as taken_over
    from commitbox.outbox_shard s left join commitbox.outbox_relay r on r.owner = s.owner
    where s.channel = @channel and r.owner is null
    order by s.shard
    limit greatest((select target from share) - (select count(*) from commitbox.outbox_shard h where h.channel = @channel and h.owner = @owner::uuid), 0)
)
update commitbox.outbox_shard s set owner = @owner::uuid, epoch = nextval('commitbox.outbox_epoch'), unclean = f.taken_over
from free f where s.channel = @channel and s.shard = f.shard;

-- name: RenewRelay :execrows
-- Prolongs the relay's one lease row: primary key, nobody else locks it. 0 rows: the lease ended before; this
-- incarnation is dead, even if nobody has taken its shards yet.
update commitbox.outbox_relay set lease_until = clock_timestamp() + make_interval(secs => @lease_seconds::float8)
where owner = @owner::uuid and lease_until > clock_timestamp();

-- name: LeaveRelay :exec
-- Hands everything back at once, after the lanes have drained: shard rows by primary key prefix, then the lease row.
-- The owner guard leaves a successor's shards alone. One statement, so a crash leaves all or nothing handed back.
with released as (
    update commitbox.outbox_shard s set owner = null, unclean = false where s.channel = @channel and s.owner = @owner::uuid
)
delete from commitbox.outbox_relay r where r.owner = @owner::uuid;

-- name: ReleaseShards :exec
-- Gives shards back one by one, after their lanes have drained: so that a relay that joined gets its share. Primary key;
-- owner and epoch guard what somebody else holds by now.
update commitbox.outbox_shard s set owner = null, unclean = false
from rows from (unnest(@shards::smallint[]), unnest(@epochs::bigint[])) as u (shard, epoch)
where s.channel = @channel and s.shard = u.shard and s.owner = @owner::uuid and s.epoch = u.epoch;

-- name: OwnedShards :many
-- The tick, first half: what the relay owns now and under which epoch. Plain read, primary key prefix, 64 rows. Deletes of
-- confirmed messages are not fenced, so without this look a relay whose messages all succeed would never notice a change.
select shard, epoch, unclean, coalesce(probe_id, 0)::bigint as probe_id, probe_count
from commitbox.outbox_shard where channel = @channel and owner = @owner::uuid order by shard;

-- name: LookAround :one
-- The tick, second half: how many relays the channel has, which of them this one is in order of joining, whether any has
-- expired, how many shards nobody owns (a missing row is one), and the policy. Plain reads of a few rows and 64; only a hint, since what is
-- done about it looks again under the channel's lock.
select c.dead_policy, c.keep_days,
       (select count(*) from commitbox.outbox_relay r where r.channel = c.channel)::integer as members,
       (select count(*) from commitbox.outbox_relay r where r.channel = c.channel
         and (r.joined_at, r.owner) < (select m.joined_at, m.owner from commitbox.outbox_relay m where m.owner = @owner::uuid))::integer as rank,
       exists (select 1 from commitbox.outbox_relay r where r.channel = c.channel and r.lease_until < clock_timestamp()) as expired,
       (64 - (select count(*) from commitbox.outbox_shard s join commitbox.outbox_relay r on r.owner = s.owner
         where s.channel = c.channel))::integer as free
from commitbox.outbox_channel c where c.channel = @channel;

-- name: ServerStart :one
-- When the server started. A change means that sequences may have gone back: all floors are void.
select pg_postmaster_start_time()::timestamptz as started_at;
