-- No key and no check here would hide money that arrives twice.
create table account (name text primary key, balance bigint not null);
create table sent    (id text, payer text, payee text, amount bigint);
create table arrived (id text, payee text, amount bigint);
