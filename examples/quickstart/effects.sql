with moved as (
    select sku, coalesce((select sum(quantity) from orders o where o.sku = s.sku), 0) as sold, 1000000000 - available as taken
      from stock s
)
select
    (select count(*) from orders) as orders,
    (select count(*) from payments) as payments,
    (select count(*) from orders o where not exists (select from payments p where p.order_id = o.id)) as unpaid,
    (select coalesce(sum(n - 1), 0)::bigint from (select count(*) as n from payments group by order_id) p) as paid_again,
    (select count(*) from orders o, (values ('orders.placed'), ('orders.paid')) e (event)
      where not exists (select from timeline t where t.order_id = o.id and t.event = e.event)) as timeline_missing,
    (select coalesce(sum(n - 1), 0)::bigint
       from (select count(*) as n from timeline group by order_id, event) t) as timeline_again,
    (select sum(greatest(0, sold - taken))::bigint from moved) as stock_missing,
    (select sum(greatest(0, taken - sold))::bigint from moved) as stock_again,
    (select count(*) from commitbox.outbox_dead)
        + (select count(*) from commitbox.inbox where status = 'dead') as dead;
