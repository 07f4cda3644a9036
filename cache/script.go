package cache

import (
	_ "embed"
	"regexp"

	"github.com/redis/go-redis/v9"
)

//go:embed scripts/begin.lua
var beginText string

//go:embed scripts/renew.lua
var renewText string

//go:embed scripts/release.lua
var releaseText string

//go:embed scripts/finish.lua
var finishText string

// The scripts are sent by their hash, and as text where the server does not know them. Each is idempotent by its token:
// the client may repeat a call whose answer was lost.
var (
	beginScript   = script(beginText)
	renewScript   = script(renewText)
	releaseScript = script(releaseText)
	finishScript  = script(finishText)
)

var luaComment = regexp.MustCompile(`(?m)^\s*--.*\n`)

// script leaves the comments out of what is sent.
func script(text string) *redis.Script { return redis.NewScript(luaComment.ReplaceAllString(text, "")) }
