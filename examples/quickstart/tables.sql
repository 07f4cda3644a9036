-- The business tables. None has a unique key or a constraint that would hide a double effect.
create table orders   (id text, sku text, quantity integer, amount integer, placed_at timestamptz default now());
create table stock    (sku text, available bigint);
create table payments (order_id text, amount integer, paid_at timestamptz default now());
create table timeline (order_id text, event text, at timestamptz default now());

insert into stock select 'sku-' || n, 1000000000 from generate_series(0, 9) n;

-- For the services' own look-ups, and not unique.
create index on orders (id);
