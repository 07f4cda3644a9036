package inbox

import "github.com/commitbox/commitbox/internal/check"

// Limits of an [ID], in bytes.
const (
	consumerLenMax = 200
	messageLenMax  = 512
)

// ID says which message is handled by whom. Both parts are compared byte by byte. Two consumers that handle one message
// each have their own row and both run. Not promised: that two messages differ. A producer that gives one id to two messages
// gets one effect (see Message.Fingerprint), and one that gives two ids to copies of a message gets two.
type ID struct {
	Consumer string // the handler's name, such as "payments.charge"; 1 to 200 bytes, valid UTF-8 without NUL
	Message  string // the message's identity, the same on every copy; 1 to 512 bytes, valid UTF-8 without NUL
}

func (id ID) String() string { return id.Consumer + "/" + id.Message }

func (id ID) check() error {
	if err := check.Text("ID.Consumer", id.Consumer, consumerLenMax); err != nil {
		return err
	}
	return check.Text("ID.Message", id.Message, messageLenMax)
}
