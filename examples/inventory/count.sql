-- What was done, counted in the business tables alone. $1 is the orders as they were sent: their ids, $2 to $5 their lines.
with sent as (
    select * from rows from (unnest($2::text[]), unnest($3::integer[]), unnest($4::text[]), unnest($5::integer[]))
        as l (order_id, line, sku, quantity)
), wanted as (
    select order_id, sku, sum(quantity) as quantity from sent group by order_id, sku
), counted as (
    select s.sku, s.delivered - s.available as taken,
           coalesce((select sum(l.quantity) from order_line l where l.sku = s.sku), 0) as sold
      from stock s
)
select
    (select count(*) from orders where reserved) as reserved,
    (select count(*) from orders where not reserved) as rejected,
    (select count(*) from unnest($1::text[]) as s (id) where not exists (select from orders o where o.id = s.id)) as undecided,
    (select count(*) from order_line) as lines,
    (select count(*) from sent l join orders o on o.id = l.order_id and o.reserved
      where not exists (select from order_line h where (h.order_id, h.line, h.sku, h.quantity) = (l.order_id, l.line, l.sku, l.quantity))) as lines_missing,
    (select count(*) from order_line h where not exists (select from sent l join orders o on o.id = l.order_id and o.reserved
      where (h.order_id, h.line, h.sku, h.quantity) = (l.order_id, l.line, l.sku, l.quantity))) as lines_too_many,
    (select coalesce(sum(abs(taken - sold)), 0)::bigint from counted) as pieces_off,
    (select count(*) from stock where available < 0) as negative,
    (select count(*) from orders o where not reserved and not exists (
        select from wanted w join stock s on s.sku = w.sku where w.order_id = o.id and w.quantity > s.available)) as rejected_for_nothing;
