-- Steps of a queue, each atomic, for Redis 6.2. A step begins with "-- step: NAME"; what precedes the first is in all.
--
-- KEYS are streams of the four classes, of ended jobs and of dead jobs, and the mark that a worker is idle. ARGV begins
-- with the prefix of all other keys, which share its hash tag. A job is a hash and, until its end, an entry of its
-- class's stream; its field `result`, written once, ends it. `attempts` counts to the limit; `begun` numbers attempts
-- uniquely. Giving a job back lowers `attempts`, not `begun`. A worker lives while its number in `beats` changes: idle
-- times of streams follow the wall clock.
local GROUP, RETURNED = 'workers', 'returned'  -- consumer of jobs given back
local KEPT_ENDS = 100000  -- entries of ended and of dead jobs
local KEPT_CHUNKS = 4096  -- per token stream
local STALE_CONSUMER_MS = 3600000
local prefix = ARGV[1]
local ENDED, DEAD, IDLE, BEATS = KEYS[5], KEYS[6], KEYS[7], prefix .. 'beats'
local function key_of(id) return prefix .. 'job:' .. id end
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
local function drop(class, entry)
  redis.call('XACK', KEYS[class], GROUP, entry)
  redis.call('XDEL', KEYS[class], entry)
end
local function finish(id, state, result)
  local job = redis.call('HMGET', key_of(id), 'result', 'class', 'entry', 'ttl', 'stream', 'begun')
  if job[1] or not job[2] then return 0 end
  redis.call('HSET', key_of(id), 'state', state, 'result', result)
  redis.call('PEXPIRE', key_of(id), job[4])
  drop(tonumber(job[2]), job[3])
  redis.call('XADD', ENDED, 'MAXLEN', '~', KEPT_ENDS, '*', 'id', id)
  if job[5] == '1' then
    redis.call('XADD', prefix .. 'tokens:' .. id, '*', 'attempt', job[6] or '0', 'end', state)
    redis.call('PEXPIRE', prefix .. 'tokens:' .. id, job[4])
  end
  return 1
end
local function bury(id, reason)
  local job = redis.call('HMGET', key_of(id), 'class', 'entry', 'attempts')
  local found = redis.call('XRANGE', KEYS[tonumber(job[1])], job[2], job[2])[1]
  redis.call('XADD', DEAD, 'MAXLEN', '~', KEPT_ENDS, '*', 'id', id, 'reason', reason, 'attempts', job[3],
    'job', found and found[2][4] or '')
  finish(id, 'dead', cjson.encode({error = reason}))
end
local function is_held(id, consumer)
  local job = redis.call('HMGET', key_of(id), 'owner', 'result')
  return job[1] == consumer and not job[2]
end
local function try(...)  -- a read that fails before the group is made
  local found = redis.pcall(...)
  return found.err and {} or found
end

-- step: enqueue
-- bound, ttl_ms, then id, class, payload, stream of each job. Return {jobs before, 1 if new else 0, …},
-- without room {jobs before}.
local before, at, news, seen = 0, now_ms(), 0, {}
for class = 1, 4 do before = before + redis.call('XLEN', KEYS[class]) end
for i = 4, #ARGV, 4 do
  local id = ARGV[i]
  if not seen[id] and redis.call('EXISTS', key_of(id)) == 0 then news = news + 1 end
  seen[id] = true
end
local out = {before}
if before + news > tonumber(ARGV[2]) then return out end
for i = 4, #ARGV, 4 do
  local id, class = ARGV[i], tonumber(ARGV[i + 1])
  if redis.call('EXISTS', key_of(id)) == 0 then
    local entry = redis.call('XADD', KEYS[class], '*', 'id', id, 'job', ARGV[i + 2])
    redis.call('HSET', key_of(id), 'state', 'waiting', 'class', class, 'entry', entry, 'attempts', 0,
      'at', at, 'ttl', ARGV[3], 'stream', ARGV[i + 3])
    out[#out + 1] = 1
  else
    out[#out + 1] = 0
  end
end
if news > 0 and redis.call('DEL', IDLE) == 1 then redis.call('PUBLISH', prefix .. 'bell', 'work') end
return out

-- step: take
-- consumer, room, max_attempts, 1 to claim returned jobs, 1 for the lowest class first, then dead workers and
-- their beats. Return {id, attempt, age in ms, payload} of each job.
local consumer, room, most = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local taken, at = {}, now_ms()
local function begin(class, entry)
  local id = entry[2] and entry[2][2]
  local job = id and redis.call('HMGET', key_of(id), 'result', 'attempts', 'at', 'entry')
  if not job or job[1] or job[4] ~= entry[1] then
    drop(class, entry[1])
  elseif tonumber(job[2]) >= most then
    bury(id, 'no answer after ' .. job[2] .. ' attempts: the last worker ended, or lost its lease, before one')
  else
    redis.call('HSET', key_of(id), 'state', 'running', 'owner', consumer, 'attempts', tonumber(job[2]) + 1)
    taken[#taken + 1] = {id, redis.call('HINCRBY', key_of(id), 'begun', 1), at - tonumber(job[3]), entry[2][4]}
  end
end
local function claim(class, other)
  while #taken < room do
    local pending = try('XPENDING', KEYS[class], GROUP, '-', '+', room - #taken, other)
    if #pending == 0 then return end
    for i, item in ipairs(pending) do pending[i] = item[1] end
    local found = redis.call('XCLAIM', KEYS[class], GROUP, consumer, 0, unpack(pending))
    for _, entry in ipairs(found) do if entry then begin(class, entry) end end
  end
end
local function read(class, most_read)
  if most_read <= 0 then return end
  local found = redis.call(
    'XREADGROUP', 'GROUP', GROUP, consumer, 'COUNT', most_read, 'STREAMS', KEYS[class], '>')
  if found then for _, entry in ipairs(found[1][2]) do begin(class, entry) end end
end
local dropped = {}
if ARGV[5] == '1' then
  for class = 1, 4 do redis.pcall('XGROUP', 'CREATE', KEYS[class], GROUP, '0', 'MKSTREAM') end
  dropped[1] = RETURNED
end
for i = 7, #ARGV, 2 do  -- unless it is back
  if (redis.call('HGET', BEATS, ARGV[i]) or '') == ARGV[i + 1] then dropped[#dropped + 1] = ARGV[i] end
end
if ARGV[6] == '1' then
  for class = 4, 2, -1 do if #taken == 0 then read(class, 1) end end
end
for class = 1, 4 do
  for _, other in ipairs(dropped) do claim(class, other) end
  read(class, room - #taken)
end
if #taken == 0 then redis.call('SET', IDLE, '1', 'EX', 60) end
return taken

-- step: finish
-- id, state, result of each job. Return 1 for each first result.
local out = {}
for i = 2, #ARGV, 3 do out[#out + 1] = finish(ARGV[i], ARGV[i + 1], ARGV[i + 2]) end
return out

-- step: fail
-- consumer, id, attempt, max_attempts, reason. Return 1 for another attempt, 0 for a dead or lost job.
local id = ARGV[3]
if not is_held(id, ARGV[2]) then return 0 end
local job = redis.call('HMGET', key_of(id), 'attempts', 'begun')
if job[2] ~= ARGV[4] then return 1 end  -- counted before: the answer was lost
if tonumber(job[1]) >= tonumber(ARGV[5]) then
  bury(id, ARGV[6])
  return 0
end
redis.call('HINCRBY', key_of(id), 'attempts', 1)
redis.call('HINCRBY', key_of(id), 'begun', 1)
return 1

-- step: beat
-- consumer, ids. Beat. Return {lost ids, {consumer, beat, …} of other workers with jobs}.
redis.call('HINCRBY', BEATS, ARGV[2], 1)
local lost, others, seen = {}, {}, {[ARGV[2]] = true, [RETURNED] = true}
for i = 3, #ARGV do
  if not is_held(ARGV[i], ARGV[2]) then lost[#lost + 1] = ARGV[i] end
end
for class = 1, 4 do
  for _, item in ipairs(try('XPENDING', KEYS[class], GROUP)[4] or {}) do
    if not seen[item[1]] then
      seen[item[1]] = true
      others[#others + 1] = item[1]
      others[#others + 1] = redis.call('HGET', BEATS, item[1]) or ''
    end
  end
end
return {lost, others}

-- step: give_back
-- consumer, ids to keep.
local kept, count = {}, 0
for i = 3, #ARGV do kept[ARGV[i]] = true end
local function give_back(class, entry)
  local found = redis.call('XRANGE', KEYS[class], entry, entry)[1]
  local id = found and found[2][2]
  if not id or kept[id] then return end
  redis.call('HSET', key_of(id), 'state', 'waiting', 'owner', '')
  redis.call('HINCRBY', key_of(id), 'attempts', -1)
  redis.call('XCLAIM', KEYS[class], GROUP, RETURNED, 0, entry, 'JUSTID')
  count = count + 1
end
for class = 1, 4 do
  local pending = try('XPENDING', KEYS[class], GROUP, '-', '+', 10000, ARGV[2])
  for _, item in ipairs(pending) do give_back(class, item[1]) end
end
if count > 0 then redis.call('PUBLISH', prefix .. 'bell', 'work') end
return count

-- step: leave
-- consumer. Forget this and long silent consumers without jobs.
for class = 1, 4 do
  for _, item in ipairs(try('XINFO', 'CONSUMERS', KEYS[class], GROUP)) do
    local of = {}
    for i = 1, #item, 2 do of[item[i]] = item[i + 1] end
    if of.pending == 0 and (of.name == ARGV[2] or of.idle > STALE_CONSUMER_MS) then
      redis.call('XGROUP', 'DELCONSUMER', KEYS[class], GROUP, of.name)
      redis.call('HDEL', BEATS, of.name)  -- a living one is made again by its next take and beat
    end
  end
end
redis.call('HDEL', BEATS, ARGV[2])
return 0

-- step: cancel
-- id. Return 1: cancelled; 0: it had ended; -1: unknown.
if redis.call('EXISTS', key_of(ARGV[2])) == 0 then return -1 end
local done = finish(ARGV[2], 'cancelled', '{}')
if done == 1 then redis.call('PUBLISH', prefix .. 'bell', 'cancel ' .. ARGV[2]) end
return done

-- step: emit
-- consumer, then id, attempt, chunk number, text of each chunk. Add new chunks of held jobs.
for i = 3, #ARGV, 4 do
  local id, attempt, number = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local told = redis.call('HMGET', key_of(id), 'told_attempt', 'told')
  local is_new = told[1] ~= attempt or tonumber(number) > tonumber(told[2])
  if is_new and is_held(id, ARGV[2]) then
    local key = prefix .. 'tokens:' .. id
    redis.call('HSET', key_of(id), 'told_attempt', attempt, 'told', number)
    redis.call('XADD', key, 'MAXLEN', '~', KEPT_CHUNKS, '*', 'attempt', attempt, 'text', ARGV[i + 3])
    redis.call('PEXPIRE', key, redis.call('HGET', key_of(id), 'ttl'))
  end
end
return 0

-- step: count
-- Return {waiting and running by class, running by class, dead}.
local out = {}
for class = 1, 4 do out[class] = redis.call('XLEN', KEYS[class]) end
for class = 1, 4 do
  local pending = try('XPENDING', KEYS[class], GROUP)
  local running = pending[1] or 0
  for _, item in ipairs(pending[4] or {}) do
    if item[1] == RETURNED then running = running - tonumber(item[2]) end
  end
  out[4 + class] = running
end
out[9] = redis.call('XLEN', DEAD)
return out
