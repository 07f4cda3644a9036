-- Replaces a token by what the message was finished with. One key, so one slot.
-- KEYS[1]  the message
-- ARGV[1]  token      ARGV[2]  finished value: 'D', the token's length as a byte, the token, the sealed entry
-- ARGV[3]  how long to keep it, in milliseconds
-- Only another token's lease or finish stands in the way. A key that is gone (evicted, flushed, run out) is held by nobody:
-- the work is done, and saying so keeps it from being done again. Finishing twice with one token changes nothing.
-- Returns 1 if the message is finished by this token, else 0.
local value = redis.pcall('GETRANGE', KEYS[1], 0, 256)
if type(value) == 'string' and value ~= 'L' .. ARGV[1] then
  local kind = string.sub(value, 1, 1)
  local head = string.sub(ARGV[2], 1, 2 + #ARGV[1])
  if string.sub(value, 1, #head) == head then
    return 1
  end
  if kind == 'L' or kind == 'D' then
    return 0
  end
end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
