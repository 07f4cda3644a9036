-- The keys and the check are the last line of defence: in a normal run nothing ever reaches them.
create table stock (
    sku       text    primary key,
    delivered integer not null, -- what once lay there
    available integer not null check (available >= 0),
    version   bigint  not null default 0
);
create table orders (
    id       text primary key,
    reserved boolean not null,
    missing  text -- the item that there was not enough of
);
create table order_line (
    order_id text    not null references orders,
    line     integer not null,
    sku      text    not null references stock,
    quantity integer not null check (quantity > 0),
    primary key (order_id, line)
);

insert into stock (sku, delivered, available) values ('apples', 40, 40), ('pears', 25, 25), ('plums', 10, 10);
