-- Takes a message or a lock for a token. One key, so one slot.
-- KEYS[1]  what is taken
-- ARGV[1]  token      ARGV[2]  lease in milliseconds
-- ARGV[3]  greatest length of a value
-- ARGV[4]  SHA-1 of a value that the caller has refused to believe, or ''
-- A value is 'L' and the token that holds the key, or 'D' and what it was finished with; both expire. Whatever else is found
-- holds nothing and is replaced. The same token gets the key again, so a repetition after a lost answer does no harm.
-- Returns who has it (0 the token, 1 another one, 2 finished), the milliseconds left, the finished value, and 1 if something
-- unreadable was replaced.
local value = redis.pcall('GETRANGE', KEYS[1], 0, ARGV[3])
local mine = 'L' .. ARGV[1]
local replaced = 0
if value ~= '' and value ~= mine then
  replaced = 1
  local left = redis.call('PTTL', KEYS[1])
  if type(value) == 'string' and #value <= tonumber(ARGV[3]) and left >= 0 then
    local kind = string.sub(value, 1, 1)
    if kind == 'L' then
      return {1, left, '', 0}
    end
    if kind == 'D' and (ARGV[4] == '' or redis.sha1hex(value) ~= ARGV[4]) then
      return {2, left, value, 0}
    end
  end
end
redis.call('SET', KEYS[1], mine, 'PX', ARGV[2])
return {0, 0, '', replaced}
