// Package commitbox makes a database change and a message one act, for Go and PostgreSQL.
//
// The work is done by its sub-packages:
//
//   - outbox stores messages in the business transaction and relays them to a broker, at least once, in order per key
//   - inbox runs a handler with one effect per message, the dedup row written in the handler's transaction
//   - optimistic changes a row only if it is still at the version that was read
//   - scheduler runs jobs by cron lines, each tick once across replicas
//   - migrate creates the tables; migrations holds them as plain SQL
//   - brokers/… publish and consume
//
// This package holds what they share: how the library reports measurements. Reports come in two ways: measurements to an
// [Observer], and events to a *slog.Logger. Log lines carry ids, never payloads or credentials.
package commitbox

// Kind tells how the values of a metric add up.
type Kind uint8

const (
	Counter   Kind = iota // values are added
	Gauge                 // the last value counts
	Histogram             // values are distributed, in the metric's unit
)

// Metric describes one measurement. Its label names are fixed, and every label has few values: channels and consumers
// that the program names, and outcomes from a fixed set. Ids, keys, topics and error texts are never labels.
type Metric struct {
	Name   string   // such as "commitbox_outbox_published"
	Kind   Kind     //
	Unit   string   // "s" for seconds, "By" for bytes, "1" for counts
	Help   string   // one sentence
	Labels []string // label names, in the order in which Observe gets their values
}

// Observer receives measurements. Observe is called from many goroutines at once, often on a hot path: it must be safe
// for that, must not block and must not keep labels. len(labels) equals len(m.Labels).
//
// An adapter for a metrics library creates one instrument for each of [Metrics] and looks it up by the pointer m.
type Observer interface {
	Observe(m *Metric, value float64, labels ...string)
}

// Discard is an Observer that drops everything. It is what a nil Observer in a configuration stands for.
var Discard Observer = discard{}

type discard struct{}

func (discard) Observe(*Metric, float64, ...string) {}
