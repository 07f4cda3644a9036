package httpidem

import (
	"errors"
	"net/http"
	"net/textproto"
	"net/url"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/inbox"
)

// Config holds the settings of a [Middleware]. Name and Scope are required; another zero field means its default.
type Config struct {
	// Name tells the keys of this API from those of others in one database. It must stay the same as long as keys are kept.
	Name string
	// Scope returns who sends the request: the tenant, the user, or both. A key counts within its scope only, so that no
	// caller can get at another one's response. It is called before the handler, behind whatever middleware has authenticated
	// the caller, and must not read the body. An error or an empty scope is answered with 403.
	Scope func(r *http.Request) (string, error)

	// Methods are those whose requests must carry a key. Default: POST and PATCH. Requests with other methods may carry one;
	// that of GET, HEAD, OPTIONS and TRACE is ignored. Without a key the handler runs in a transaction that is not guarded.
	Methods []string
	// Optional lets requests of Methods come without a key.
	Optional bool
	// AllowUnquoted accepts a key that is not a quoted string, as many clients send it: letters, digits and -_.:~+/=. The
	// quoted and the unquoted form are the same key.
	AllowUnquoted bool
	// KeyMax bounds a key. Default and largest value 255 bytes.
	KeyMax int
	// BodyMax bounds the request's body, which is read before the handler runs. Default 1 MiB.
	BodyMax int64

	// ResponseMax bounds the response's body in memory; a longer one is refused and rolled back. Default 8 MiB.
	ResponseMax int
	// StoreMax bounds the body that is kept for repeats. Default 64 KiB, at most 512 KiB.
	StoreMax int
	// Headers are the response headers that a repeat gets, too. Default: Content-Type, Content-Language, Content-Encoding,
	// Content-Location, Location, ETag, Last-Modified and Link.
	Headers []string
	// Keep says of which statuses the response is kept and the handler's writes are committed; see the package documentation
	// for the default. It is not asked for 5xx and 429, which never are.
	Keep func(status int) bool

	// RetryAfter is what clients are told where nothing better is known. Default 1 s.
	RetryAfter time.Duration
	// Docs is the URL of the page that tells clients about keys: the type of every problem, and a Link header.
	Docs string

	// Inbox holds the settings of the store: Schema, Wait, CommitWait, Observer, Logger; and Policies, Cache and Guard, with
	// which operators change how keys are guarded. The consumer's name is "http/" and Name: in mode cache this package
	// promises what that mode does, in mode off nothing, and a policy's max_attempts counts COMMITs that PostgreSQL refuses.
	// What says how failures are counted (MaxAttempts, IgnoreDue, IsPermanent) and ResultMax is set by this package.
	Inbox inbox.Config
}

const (
	keyMaxMax   = 255
	storeMaxMax = 512 << 10
	// attempts that end without a response to keep are not counted; the few that are (a refused COMMIT) never bury a key
	attemptsMax = 1e6
)

var headersDefault = []string{
	"Content-Type", "Content-Language", "Content-Encoding", "Content-Location", "Location", "Etag", "Last-Modified", "Link",
}

// headersNever belong to one session or one connection, or are this package's own.
var headersNever = []string{
	"Set-Cookie", "Set-Cookie2", "Cookie", "Authorization", "Proxy-Authorization", "Www-Authenticate", "Proxy-Authenticate",
	"Authentication-Info", "Proxy-Authentication-Info", "Connection", "Keep-Alive", "Proxy-Connection", "Te", "Trailer",
	"Transfer-Encoding", "Upgrade", "Content-Length", "Date", HeaderReplayed, HeaderBody,
}

var methodsSafe = []string{http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace}

// statusesPassing tell of the moment and not of the request, so a repeat has to ask again.
var statusesPassing = []int{
	http.StatusUnauthorized, http.StatusForbidden, http.StatusProxyAuthRequired, http.StatusRequestTimeout,
	http.StatusTooEarly, http.StatusTooManyRequests,
}

func keepDefault(status int) bool { return !slices.Contains(statusesPassing, status) }

// New returns a Middleware whose transactions come from pool. It sends nothing; its error names every field that is wrong.
func New(pool *pgxpool.Pool, cfg Config) (*Middleware, error) {
	cfg.fill()
	box, err := inbox.New(pool, cfg.Inbox)
	if err := errors.Join(cfg.check(), err); err != nil {
		return nil, err
	}
	return &Middleware{pool: pool, box: box, cfg: cfg}, nil
}

func (c *Config) fill() {
	if c.Methods == nil {
		c.Methods = []string{http.MethodPost, http.MethodPatch}
	}
	if c.Headers == nil {
		c.Headers = headersDefault
	}
	c.Headers = slices.Clone(c.Headers)
	for i, name := range c.Headers {
		c.Headers[i] = textproto.CanonicalMIMEHeaderKey(name)
	}
	if c.Keep == nil {
		c.Keep = keepDefault
	}
	fill(&c.KeyMax, keyMaxMax)
	fill(&c.BodyMax, 1<<20)
	fill(&c.ResponseMax, 8<<20)
	fill(&c.StoreMax, 64<<10)
	fill(&c.RetryAfter, time.Second)
	c.Inbox.MaxAttempts, c.Inbox.MaxDeliveries, c.Inbox.IgnoreDue, c.Inbox.ResultMax = attemptsMax, 0, true, 0
	c.Inbox.IsPermanent = func(error) bool { return false }
}

func fill[T comparable](field *T, standard T) {
	if *field == *new(T) {
		*field = standard
	}
}

func (c *Config) check() error {
	var errs []error
	refuse := func(bad bool, field, problem string) {
		if bad {
			errs = append(errs, &commitbox.InputError{Field: "Config." + field, Problem: problem})
		}
	}
	refuse(c.Scope == nil, "Scope", "is nil; keys of different callers must not meet")
	if _, err := inbox.NewID(service, c.Name, "", "key"); err != nil {
		errs = append(errs, &commitbox.InputError{Field: "Config.Name", Problem: "is empty or too long"})
	}
	for _, method := range c.Methods {
		refuse(slices.Contains(methodsSafe, method), "Methods", "holds a safe method, whose requests need no key")
	}
	for _, name := range c.Headers {
		refuse(slices.Contains(headersNever, name), "Headers", "holds "+name+", which is never replayed")
	}
	refuse(c.KeyMax < 1 || c.KeyMax > keyMaxMax, "KeyMax", "must be 1 to 255 bytes")
	refuse(c.BodyMax < 0, "BodyMax", "is negative")
	refuse(c.StoreMax < 1 || c.StoreMax > storeMaxMax, "StoreMax", "must be 1 to 524288 bytes")
	refuse(c.ResponseMax < c.StoreMax, "ResponseMax", "is smaller than StoreMax")
	refuse(c.RetryAfter < 0, "RetryAfter", "is negative")
	_, err := url.Parse(c.Docs)
	refuse(err != nil, "Docs", "is not a URL")
	return errors.Join(errs...)
}
