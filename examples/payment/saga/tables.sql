-- An order and where it stands. stock is decided once for each arrow, in a transaction that has locked the row, so a copy of
-- the work (a process that was believed dead, a second delivery) finds the decision and changes nothing:
--
--   none ──▶ reserved ──▶ taken          status confirmed
--     │          ├──────▶ short          status refunded   (the goods were gone when they were to be taken)
--     │          └──────▶ released       status declined   (the card was)
--     └──▶ refused                       status refused    (sold out)
create table orders (
  id        text primary key,
  customer  text not null,
  amount    integer not null check (amount > 0), -- cents
  status    text not null default 'open' check (status in ('open', 'confirmed', 'refunded', 'declined', 'refused')),
  stock     text not null default 'none' check (stock in ('none', 'reserved', 'taken', 'short', 'released', 'refused')),
  charge_id text,
  refund_id text,
  check (status <> 'confirmed' or stock = 'taken' and charge_id is not null and refund_id is null),
  check (status <> 'refunded' or stock = 'short' and charge_id is not null and refund_id is not null),
  check (status <> 'declined' or stock = 'released' and charge_id is null),
  check (status <> 'refused' or stock = 'refused' and charge_id is null)
);

-- Two lines of an order may have the same SKU.
create table order_line (
  order_id text not null references orders,
  sku      text not null,
  quantity integer not null check (quantity > 0)
);
create index on order_line (order_id);

create view order_sku as select order_id, sku, sum(quantity)::integer as quantity from order_line group by order_id, sku;

-- The checks are the last line of defence: no bug sells what is not there.
create table stock (
  sku      text primary key,
  price    integer not null check (price > 0),
  on_hand  integer not null check (on_hand >= 0),
  reserved integer not null default 0 check (reserved >= 0)
);
