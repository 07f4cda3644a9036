-- Prolongs the lease of the token that holds the key, and of no other. One key, so one slot.
-- KEYS[1]  what is held
-- ARGV[1]  token      ARGV[2]  lease in milliseconds
-- Returns 1 if the token holds the key, else 0. A key that is gone is not made again: another may have held it meanwhile.
if redis.pcall('GETRANGE', KEYS[1], 0, 256) == 'L' .. ARGV[1] then
  return redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 0
