package commitbox

import "fmt"

// InputError says that an argument was refused before a statement was sent: the caller's transaction is as it was and
// can go on. It is not worth a retry with the same argument.
type InputError struct {
	Field   string // the argument, such as "Message.Topic" or "messages[3].Payload"
	Problem string // what is wrong with it, without its value
	Size    int    // bytes found, when the size is the problem
	Limit   int    // bytes allowed, when the size is the problem
}

func (e *InputError) Error() string {
	if e.Limit > 0 {
		return fmt.Sprintf("commitbox: %s %s: %d bytes, the limit is %d", e.Field, e.Problem, e.Size, e.Limit)
	}
	return fmt.Sprintf("commitbox: %s %s", e.Field, e.Problem)
}
