package saga

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"
)

// Charge is what the payment service said about a charge. Declined is an answer, too: it is stored and not asked for again.
type Charge struct {
	ID       string `json:"id"`
	Declined bool   `json:"declined,omitempty"`
}

// Refund is what it said about a refund.
type Refund struct {
	ID string `json:"id"`
}

// payments is the client of the payment service.
type payments struct {
	url    string
	client *http.Client
}

// callTimeout bounds one call. It is well below a lease, and what it cuts off is asked for again with the same key.
const callTimeout = 5 * time.Second

// answerMax bounds what is read of an answer.
const answerMax = 64 << 10

// charge takes the money of the order. The key is the order's, not the attempt's: whoever sends it again, now or after a
// crash or from a process that was believed dead, gets the first answer and no second charge.
func (p *payments) charge(ctx context.Context, order Placed) (charge Charge, err error) {
	status, err := p.post(ctx, "/charges", "charge-"+order.OrderID, order, &charge)
	switch {
	case err != nil:
		return Charge{}, err
	case status == http.StatusPaymentRequired:
		return Charge{Declined: true}, nil
	case status != http.StatusCreated || charge.ID == "":
		return Charge{}, fmt.Errorf("the payment service answered a charge with %d", status)
	}
	return charge, nil
}

// refund gives the money back, under a key of the order's as well.
func (p *payments) refund(ctx context.Context, order Placed, charge Charge) (refund Refund, err error) {
	request := map[string]string{"order_id": order.OrderID, "charge_id": charge.ID}
	status, err := p.post(ctx, "/refunds", "refund-"+order.OrderID, request, &refund)
	switch {
	case err != nil:
		return Refund{}, err
	case status != http.StatusCreated || refund.ID == "":
		return Refund{}, fmt.Errorf("the payment service answered a refund with %d", status)
	}
	return refund, nil
}

// post sends one request and reads a JSON answer. Its errors mean: not known, ask again.
func (p *payments) post(ctx context.Context, path, key string, request, answer any) (status int, err error) {
	body, err := json.Marshal(request)
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url+path, bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Idempotency-Key", `"`+key+`"`)
	resp, err := p.client.Do(r)
	if err != nil {
		return 0, fmt.Errorf("payment service: %w", err)
	}
	defer resp.Body.Close()
	content, err := io.ReadAll(io.LimitReader(resp.Body, answerMax))
	if err != nil {
		return 0, fmt.Errorf("payment service: %w", err)
	}
	if resp.StatusCode == http.StatusCreated {
		if err := json.Unmarshal(content, answer); err != nil {
			return 0, fmt.Errorf("payment service: %w", err)
		}
	}
	return resp.StatusCode, nil
}
