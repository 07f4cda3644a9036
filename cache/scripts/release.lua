-- Deletes the key if the token holds it: a plain DEL would free what the next holder has taken. One key, so one slot.
-- KEYS[1]  what is held
-- ARGV[1]  token
-- Returns 1 if the token held the key, else 0.
if redis.pcall('GETRANGE', KEYS[1], 0, 256) == 'L' .. ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
